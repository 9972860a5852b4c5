"""Model runtimes: prefill in chunks, open a session."""
