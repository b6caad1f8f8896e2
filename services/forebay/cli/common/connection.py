"""Advice for failed connections to a running system."""


def advice(error: Exception) -> str:
    """Return what the user can do about a connection that failed with this error."""
    import httpx  # noqa: PLC0415 - takes 200 ms, which --help does not wait for

    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "set SSL_CERT_FILE to the certificate of the authority that signed the system's certificate"
    if isinstance(error, httpx.RemoteProtocolError):
        return "check the URL; a system with a certificate serves only https"
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return "expected a URL such as http://127.0.0.1:8000"
    return "start a system with `forebay up`"
