"""COARSE: data-parallel training synchronised by disaggregated memory devices."""

__version__ = "0.1.0"
