"""The error of a service that cannot start or continue with what its user configured."""


class ConfigError(Exception):
    """An option or a configuration is invalid. The message is one line: what is wrong and what to do."""
