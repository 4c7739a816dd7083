"""What users see: progress, tables, plots."""
