"""The text backbone of DeepSeek-V4.1 as plain float32 PyTorch."""

from .config import V41Config
from .experts import clamped_swiglu
from .model import V41Layer, V41Model

__all__ = ["V41Config", "V41Layer", "V41Model", "clamped_swiglu"]
