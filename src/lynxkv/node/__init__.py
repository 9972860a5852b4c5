"""The two conductors: prefill node and decode node."""
