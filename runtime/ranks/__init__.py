"""What ranks tell each other beside tensors: texts, what they agree on, and where they are."""
