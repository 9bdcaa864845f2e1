"""Where result bytes live: the tiers behind one ResultStore."""
