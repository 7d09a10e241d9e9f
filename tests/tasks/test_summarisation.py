from task_toys import config

from jaxformer import tasks


def test_it_is_learned_as_a_translation_and_judged_by_rouge():
    task, translation = tasks.get("summarisation"), tasks.get("translation")
    assert (task.encode, task.loss, task.predict) == (translation.encode, translation.loss, translation.predict)
    settings = config("summarisation")
    examples = [{"source": "a long text", "target": "two cats"}, {"source": "another", "target": "a dog"}]
    scores = task.score(settings, ["two cats", "the cat"], examples)
    assert scores == {"rouge1": 50.0, "rouge2": 50.0, "rouge_l": 50.0}
    assert set(task.score_signatures(settings)) == set(scores)
