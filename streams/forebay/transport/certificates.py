"""Advice for connections that fail because of a certificate."""


def certificate_remedy(reason: str, service: str, option: str) -> str:
    """Return what to do about a TLS handshake that failed for this reason. Empty if no certificate is the cause.

    Args:
        service: name of the server in the advice.
        option: setting with the certificate of the authority that the client trusts.
    """
    if "CERTIFICATE_VERIFY_FAILED" not in reason:
        return ""
    if "expired" in reason:
        return f"renew the certificate of {service}"
    if "mismatch" in reason:
        return f"use an address of {service} that its certificate names"
    return f"set {option} to the certificate of the authority that signed the certificate of {service}"
