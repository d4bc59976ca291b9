"""Contract checks of every kind of plugin: `lab check` runs them on one plugin, tests/contracts on all of them."""


class CheckFailed(AssertionError):
    """A plugin breaks its contract; the message says how, in words its author can act on."""
