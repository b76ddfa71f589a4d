"""Packs: the directory an engine serves, how it is built, resumed, read back and verified."""

from .build import BuildRequest, build
from .reader import Pack
from .recipe import Recipe
from .verify import verify

__all__ = ["BuildRequest", "Pack", "Recipe", "build", "verify"]
