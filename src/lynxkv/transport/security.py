"""Who may talk to a node: certificates of one authority, a shared secret, or both."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from lynxkv.errors import RequestError


@dataclass(frozen=True, slots=True)
class Security:
    """How nodes know each other; the default knows nobody and takes everyone.

    With certificates every connection is TLS 1.2 or newer and each side verifies the other's certificate against
    ``ca``, which is to be the nodes' own authority; whoever connects also checks the name or address it connected to.
    The secret goes with the greeting of each side and is compared in constant time: without certificates it crosses the
    network as it is.

    Parameters
    ----------
    cert, key, ca : Path or None
        PEM files of this node's certificate chain, its key, and the authority; all three or none.
    secret : str or None
        Shared by all nodes.

    Raises
    ------
    RequestError
        Some files are given and some are not, or the secret is empty or longer than 1024 characters.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        given = [name for name in ("cert", "key", "ca") if getattr(self, name) is not None]
        if given and len(given) < 3:
            raise RequestError(f"TLS between nodes needs a certificate, its key and the authority; got {given} only")
        if self.secret is not None and not 0 < len(self.secret) <= 1024:
            raise RequestError("the secret of the nodes must have 1..1024 characters")
        if self.secret is not None and any("\ud800" <= c <= "\udfff" for c in self.secret):
            raise RequestError("the secret of the nodes must be text, and is not valid UTF-8")

    def server_context(self) -> ssl.SSLContext | None:
        """For whoever listens; None: no TLS. RequestError names a file that cannot be used."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext | None:
        """For whoever connects; None: no TLS. RequestError names a file that cannot be used."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext | None:
        if self.cert is None or self.key is None or self.ca is None:
            return None
        context = identified(protocol, self.cert, self.key)
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.ca)
        except OSError as e:
            raise RequestError(f"authority {self.ca} cannot be used: {e}") from e
        return context


def identified(protocol: int, cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer for one side, which shows ``cert``; RequestError names files that cannot be used."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except OSError as e:
        raise RequestError(f"certificate {cert} with key {key} cannot be used: {e}") from e
    return context


OPEN = Security()
"""Nobody is asked who they are."""
