"""The steps of a replica: policies choose what runs, a builder fills the plan, results are applied."""
