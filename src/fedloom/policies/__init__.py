"""The questions that methods answer, one file each; every answer is a small frozen class usable under any method."""
