"""Errors whose message is one sentence for a user: it names the thing and the mend."""


class RefusionError(Exception):
    """Base of every error that a user can cause; the command line prints it without a traceback."""


class CheckpointError(RefusionError):
    """A model, tokenizer or adapter file is missing, damaged or not supported."""


class DataError(RefusionError):
    """A data file or a row in it can't be used."""


class ConfigError(RefusionError):
    """A setting is unknown, of the wrong type or impossible together with another."""


class CapacityError(RefusionError):
    """A request needs more positions or cells than there are."""
