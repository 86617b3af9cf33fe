"""Stand-ins for what a test does not want for real: schedulers, frontends, disks, devices, collectors."""
