"""Runs a plan on real ranks and measures this machine. Uses torch."""
