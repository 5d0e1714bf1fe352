"""The version of dibs: the one place it is written down; packaging and `dibs --version` read it from here."""

__version__ = "0.1.0"
