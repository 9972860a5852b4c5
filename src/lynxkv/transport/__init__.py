"""Moves segments between processes by priority, over TCP."""

from lynxkv.transport.bucket import TokenBucket, parse_rate
from lynxkv.transport.incoming import Incoming, Sink
from lynxkv.transport.link import Link, connect
from lynxkv.transport.outgoing import Outgoing, Released
from lynxkv.transport.scheduling import Scheduler
from lynxkv.transport.server import Counters, Server

__all__ = [
    "Counters",
    "Incoming",
    "Link",
    "Outgoing",
    "Released",
    "Scheduler",
    "Server",
    "Sink",
    "TokenBucket",
    "connect",
    "parse_rate",
]
