"""What requests found computed when they were admitted, and why not more."""
