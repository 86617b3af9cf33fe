"""What is asked and what is told: values only, without a clock or a socket."""
