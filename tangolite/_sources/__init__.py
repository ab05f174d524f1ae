"""Parts of `tangolite.sources`: rows from files and from the hub, and what each set makes of a row."""
