"""Messages about a run to a webhook (`notifications` in the job)."""
