"""Many sequences at once: rows, packing, reading on the device."""

from refusion.engine.engine import Engine, Finished

__all__ = ["Engine", "Finished"]
