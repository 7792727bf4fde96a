"""The laboratory: what the command line, the demo and the recipes need beyond the library (the extra `lab`)."""
