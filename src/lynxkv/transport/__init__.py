"""Moves segments between processes by priority, over TCP."""

from lynxkv.transport.bucket import TokenBucket, parse_rate
from lynxkv.transport.counters import Counters
from lynxkv.transport.incoming import Incoming, Sink
from lynxkv.transport.link import Link, connect
from lynxkv.transport.outgoing import Outgoing, Released
from lynxkv.transport.scheduling import Scheduler
from lynxkv.transport.security import OPEN, Security, identified
from lynxkv.transport.server import Server

__all__ = [
    "OPEN",
    "Counters",
    "Incoming",
    "Link",
    "Outgoing",
    "Released",
    "Scheduler",
    "Security",
    "Server",
    "Sink",
    "TokenBucket",
    "connect",
    "identified",
    "parse_rate",
]
