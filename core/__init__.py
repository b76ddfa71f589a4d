"""moefit: fit a huge mixture-of-experts model onto the cards you own, and prove it is still the same model."""

from importlib.metadata import version

from .errors import MoefitError

__version__ = version("moefit")
__all__ = ["MoefitError", "__version__"]
