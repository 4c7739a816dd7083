"""What runs clients' work: trainers do the heavy requests, backends decide where."""
