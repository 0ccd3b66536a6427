"""The one exception type for mistakes of the user: what came, what is allowed, what to do."""


class UserError(ValueError):
    """A wrong option, recipe, model or input. The program prints its text as one line and exits with status 2."""


class CacheError(RuntimeError):
    """The cache was given data or a request that it cannot honour (NaN keys, a rollback past what is kept)."""
