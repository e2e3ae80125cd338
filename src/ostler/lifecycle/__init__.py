"""ONE LIFECYCLE: start, watch, drain, recycle, restart. What a worker serves is its tenant's business."""
