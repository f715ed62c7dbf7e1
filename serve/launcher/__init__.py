"""The launcher: starts, watches, restarts and stops all other processes of a server."""
