"""A second revision of the served model beside the first: started, compared, rolled back or promoted (docs/canary.md)."""
