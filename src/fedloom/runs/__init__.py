"""From a study to a finished run: settings, the world they make, the loop over rounds, the folder it fills."""
