"""The original model: its checkpoint, its forward pass, and what real traffic does to it.

Reading (`checkpoint`, `decode`, `layout`, `check`, `traces`) comes first; the layer-streamed forward and the
capture of Hessians and routing build on it. Nothing here knows EXL3.
"""

from .checkpoint import Checkpoint, TensorInfo

__all__ = ["Checkpoint", "TensorInfo"]
