"""What the paper's experiments show of the real engine on a CPU, and what each of its design choices is worth."""
