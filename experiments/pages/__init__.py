"""Pages that people read: numbers in pages that come from tables, and the site that is made of the pages."""
