"""Methods that send some entries, or all of them in fewer bits, with error feedback."""
