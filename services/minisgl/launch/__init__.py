"""The launcher: all processes of one machine, started, watched and ended together."""
