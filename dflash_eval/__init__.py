"""Judge DFlash drafters from a cache of the target's activations."""

__version__ = "0.1.0"
