from highlights import Highlights


def test_highlights_come_in_the_order_of_the_text() -> None:
    model = Highlights()
    model.load("highlights")
    text = "Birds sing. Horses graze. Horses like apples. It rained. Horses like carrots."
    assert model.infer({"text": text}) == ["Horses graze.", "Horses like apples.", "Horses like carrots."]
