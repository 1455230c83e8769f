"""The two ways a command ends badly."""


class UserError(Exception):
    """Something the user gave is wrong (exit status 2); the message is one to three plain lines."""


class RunError(Exception):
    """The run failed through no fault of what the user gave (exit status 1)."""
