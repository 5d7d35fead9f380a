"""What ranks tell each other beside tensors: agreements, and the watchdog's reports."""
