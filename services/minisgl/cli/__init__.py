"""The command line: flags from the dataclasses of config.py, one module for each family."""
