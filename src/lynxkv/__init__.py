"""Progressive KV-cache transfer: decode on the anchor, verify on the residual."""

__version__ = "0.1.0"
