"""Errors hscache and the trainer raise on bad input or a bad world.

Every message states what went wrong, where, what was found and expected, and what to do next.
The command lines print the message without a traceback and exit with `exit_code`.
"""


class HscacheError(Exception):
    """Base of all errors that a user can cause or mend."""

    exit_code = 1


class ConfigError(HscacheError, ValueError):
    """A setting, flag or config file is wrong; nothing was started."""

    exit_code = 2


class DataError(HscacheError, ValueError):
    """An input row or file cannot be used."""


class UnsupportedTargetError(HscacheError, ValueError):
    """The target's architecture cannot be captured without leaking between documents."""


class CacheMismatchError(HscacheError, ValueError):
    """Two things that must agree (cache, config, checkpoint) do not; carries a field diff."""


class CacheIncompleteError(HscacheError):
    """A shard or document that is needed has not been published."""


class ShardFreedError(CacheIncompleteError):
    """A shard was let go when everybody who had registered was done with it; it is not damaged."""


class ShardCorruptError(HscacheError):
    """Bytes on disk are not the bytes that were written."""


class CacheUnreadableError(HscacheError):
    """A file cannot be read here and now, which says nothing about its bytes."""


class DiskFullError(HscacheError, OSError):
    """No bytes or inodes are left where something had to be written."""


class StoppedBySignal(HscacheError):
    """A signal asked the run to stop, and everything worth keeping has been saved."""

    def __init__(self, message: str, *, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = 128 + signum
