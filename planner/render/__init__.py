"""What a person sees. Screens do no arithmetic: every number is formatted here and computed, with a test, elsewhere."""
