"""The server's certificate and its key: what is wrong with them is told by the file's name."""

from __future__ import annotations

import ssl

from octavo.config import ServerConfig
from octavo.errors import InvalidRequest, in_words


def context(config: ServerConfig) -> ssl.SSLContext | None:
    """What connections are made with; None where they are plain. Raises as `load`."""
    if config.tls_cert is None:
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load(made, config)
    return made


def load(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Let new connections have the certificate that the files hold now; none, no change. Raises
    `InvalidRequest` naming the file that cannot be read, or both where they cannot be used."""
    cert, key = config.tls_cert, config.tls_key
    if cert is None or key is None:
        return
    for flag, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            with open(path, "rb"):
                pass
        except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
            why = in_words(error)
            raise InvalidRequest(f"--{flag.replace('_', '-')} {path}: {why}", flag) from None
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = in_words(error)
        text = f"cannot use --tls-cert {cert} with --tls-key {key}: {why}"
        raise InvalidRequest(text, "tls_cert") from None
