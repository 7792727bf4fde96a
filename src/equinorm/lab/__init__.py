"""The laboratory: what the command line, the demo and the recipes need beyond the library (the extra `lab`)."""


class UserError(Exception):
    """Something the user can mend. The command line shows it as one line, without a traceback."""


__all__ = ["UserError"]
