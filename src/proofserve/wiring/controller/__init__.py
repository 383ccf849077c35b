"""What the settings of a fleet's controller mean for its parts."""
