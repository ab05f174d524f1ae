"""Running things: notebooks into pages, experiments, figures. Nothing in the methods imports from here."""
