"""One module per command: its options, and the calls it makes. What a command needs is imported when it runs."""
