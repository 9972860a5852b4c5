"""The ``lynxkv`` command."""
