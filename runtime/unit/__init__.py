"""Units and their parameters: what is gathered together, and reduced together."""
