"""weldtrain: trains a weld-defect detector and accounts for every millisecond of its data pipeline."""

__version__ = "0.1.0"
