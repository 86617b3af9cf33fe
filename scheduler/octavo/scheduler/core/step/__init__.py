"""One step of one replica: policies choose what runs, a builder fills the plan, results are applied."""
